"""The demo's picture: the loss of the killed and resumed run over that of the undisturbed run."""

from __future__ import annotations

from pathlib import Path

from demo_history import History
from matplotlib.axes import Axes
from matplotlib.figure import Figure

INK, GREY, UNDISTURBED, RUN, EVALUATION, KILL = "#222222", "#8a8a8a", "#f2b36b", "#1f5fa8", "#1a7f4b", "#c0392b"


def draw(run: History, undisturbed: History, killed_at: int, path: Path) -> None:
    """Writes the picture to `path`, as PNG."""
    figure = Figure(figsize=(9, 5), dpi=150, layout="constrained")
    axes = figure.subplots()
    steps, losses = _losses(undisturbed)
    axes.plot(steps, losses, color=UNDISTURBED, linewidth=5, solid_capstyle="round", label="training, undisturbed")
    steps, losses = _losses(run)
    axes.plot(steps, losses, color=RUN, linewidth=1.2, label="training, killed and resumed")
    evaluated = list(run.evaluations), list(run.evaluations.values())
    axes.plot(*evaluated, "o", color=EVALUATION, markersize=6, label="evaluation", clip_on=False, zorder=3)
    _mark_kill(axes, run, killed_at)
    axes.set_xlim(0, max(steps))
    axes.set_xlabel("step")
    axes.set_ylabel("loss (nats per token)")
    axes.set_title("Killed, resumed, and identical to the last bit", loc="left", color=INK, fontweight="bold", pad=30)
    axes.grid(color="#eeeeee")
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(colors=GREY)
    axes.legend(frameon=False, loc="lower left", bbox_to_anchor=(0, 1), borderaxespad=0.3, borderpad=0, ncols=3)
    figure.savefig(path)


def _losses(history: History) -> tuple[list[int], list[float]]:
    steps = sorted(history.steps)
    return steps, [history.steps[step][0] for step in steps]


def _mark_kill(axes: Axes, run: History, killed_at: int) -> None:
    """Marks the steps between the last checkpoint and the kill, which the resumed run repeated."""
    top = max(loss for loss, _ in run.steps.values())
    axes.axvline(killed_at, color=KILL, linewidth=1.2)
    axes.annotate(
        f"SIGKILL\nafter step {killed_at}", (killed_at, top), (6, 0), textcoords="offset points", va="top", color=KILL
    )
    for step in [step for step in run.resumed if step < killed_at]:
        axes.axvspan(step, killed_at, color=KILL, alpha=0.08, linewidth=0)
        axes.annotate(
            f"resumed from\ncheckpoint-{step}",
            (step, top),
            (-6, 0),
            textcoords="offset points",
            va="top",
            ha="right",
            color=GREY,
        )
