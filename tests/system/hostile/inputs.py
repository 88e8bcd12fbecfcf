"""What a stranger's folder may hold, and what each command that reads it has to answer."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from tests.system.hostile.forge import (
    ESCAPE,
    TERA,
    Forgery,
    appended,
    archive,
    config,
    evil_pickle,
    folder,
    hard_link,
    header,
    link,
    manifest,
    manifest_text,
    old,
    pipe,
    removed,
    signed_file,
    signed_json,
    sparse,
    sparse_listed,
    text,
)

MODEL, OPTIMIZER = "model.safetensors", "optimizer/optimizer.safetensors"
BEFORE_ANY_TENSOR = "inspect verify evaluate consolidate export-dcp"
OF_A_CHECKPOINT = "inspect inspect-json verify verify-run report evaluate consolidate export-dcp export-trainer"
OF_A_RUN = "inspect-run report rows"
WIDE = [1] * 60_000
SURROGATE = "\\ud800"
HUGE = "1" + "0" * 400


@dataclass(frozen=True)
class Input:
    """A forged folder. `ok`: commands that end with 0, since what they need is right or left out; `no`: those that end
    with one line of error, which has `says` in it. `keeps`: files in the run that are the user's own."""

    name: str
    forgeries: tuple[Forgery, ...]
    ok: str = ""
    no: str = ""
    says: str = ""
    keeps: tuple[str, ...] = ()

    def cells(self) -> Iterator[tuple[str, bool]]:
        """Each command with whether it succeeds."""
        yield from ((command, True) for command in self.ok.split())
        yield from ((command, False) for command in self.no.split())


def _set(*keys: Any, value: Any) -> Any:
    """A change of nested values."""

    def change(body: Any) -> None:
        *way, last = keys
        for key in way:
            body = body[key]
        body[last] = value

    return change


def _recipe(**fields: Any) -> tuple[Forgery, ...]:
    """Adds fields to the recipes in the run and in its checkpoints."""
    lines = "".join(f"{name}: {json.dumps(value)}\n" for name, value in fields.items())

    def without(content: str) -> str:
        return "".join(line for line in content.splitlines(True) if line.partition(":")[0] not in fields)

    def rewritten(place: Any) -> None:
        path = place.run / "used_recipe.yaml"
        path.write_text(without(path.read_text()) + lines)

    return rewritten, signed_file("used_recipe.yaml", lambda _, data: (without(data.decode()) + lines).encode())


def _recipe_of_data(name: str) -> tuple[Forgery, ...]:
    """Recipes that name a file of the stranger's as the data."""

    def forge(place: Any) -> None:
        for each in _recipe(train_file=str(place.root / "place" / name)):
            each(place)

    return (forge,)


def _event(kind: str, **values: Any) -> Forgery:
    return appended("run/events.jsonl", {"event": kind, "step": 1, "time": 1.7e9, **values})


def _position(**changed: Any) -> Forgery:
    """The record of the samples' order with other values."""

    def forge(place: Any) -> None:
        path = place.run / "events.jsonl"
        lines = [json.loads(line) for line in path.read_text().splitlines()]
        for line in lines:
            if line["event"] == "position":
                for key, value in changed.items():
                    if key in line["loader"]:
                        line["loader"][key] = value
                    else:
                        line[key] = value
        path.write_text("".join(json.dumps(line) + "\n" for line in lines))

    return forge


def _status(content: str) -> Forgery:
    return text("run/status.json", content)


def _index_outside(place: Any) -> None:
    """A model whose index names weights of the user's."""
    weights = place.outside / "weights.safetensors"
    (place.model / "model.safetensors").rename(weights)
    length = int.from_bytes(weights.read_bytes()[:8], "little")
    names = json.loads(weights.read_bytes()[8 : 8 + length]).keys() - {"__metadata__"}
    index = {
        "metadata": {"total_size": 1},
        "weight_map": dict.fromkeys(sorted(names), "../../outside/weights.safetensors"),
    }
    (place.model / "model.safetensors.index.json").write_text(json.dumps(index))


EVIL = text("run/evil.py", lambda place: place.code() + "def f(*_):\n    return {}\n")
OWN_CODE = {"AutoConfig": "evil.Config", "AutoModelForCausalLM": "evil.Model", "AutoTokenizer": ["evil.T", None]}

# Code that a checkpoint brings

CODE = (
    Input("metrics-of-the-recipe", (EVIL, *_recipe(metrics="evil:f")), "evaluate evaluate-inside evaluate-run"),
    Input("metrics-below-the-folder", (EVIL, *_recipe(metrics="place.run.evil:f")), "evaluate evaluate-run"),
    Input(
        "metrics-of-the-manifest",
        (EVIL, manifest(_set("metadata", "evaluation", "metrics", value="evil:f"))),
        "inspect evaluate evaluate-inside",
    ),
    Input(
        "consent-of-the-recipe",
        (
            *_recipe(trust_remote_code=True, tokenizer_name="{model}"),
            lambda place: [
                path.write_text(path.read_text().replace("{model}", str(place.model)))
                for path in (place.run / "used_recipe.yaml",)
            ],
            text("model/evil.py", lambda place: place.code() + "class T:\n    pass\n"),
            text("model/tokenizer_config.json", json.dumps({"tokenizer_class": "T", "auto_map": OWN_CODE})),
            removed("model/tokenizer.json"),
        ),
        "rows",
    ),
    Input(
        "code-beside-the-model",
        (text("model/evil.py", lambda place: place.code()), config(auto_map=OWN_CODE, model_type="evil")),
        no="evaluate evaluate-model train-model",
        says="code",
    ),
    Input(
        "code-of-the-saved-class",
        (
            signed_file("evil.py", lambda place, _: place.code().encode()),
            config(auto_map={"AutoModelForCausalLM": "evil.GPT2LMHeadModel"}),
        ),
        no="evaluate",
        says="--trust_remote_code",
    ),
    *(
        Input(f"kernel-of-{name}", (config(**{name: "stranger/kernel"}),), no=commands, says=name.strip("_"))
        for name, commands in (
            ("attn_implementation", "evaluate evaluate-model train-model"),
            ("_attn_implementation", "evaluate evaluate-model"),
            ("_attn_implementation_internal", "evaluate evaluate-model train-model"),
            ("experts_implementation", "evaluate evaluate-model"),
            ("_experts_implementation_internal", "evaluate-model"),
        )
    ),
    Input(
        "kernel-of-a-part",
        (config(text_config={"attn_implementation": "stranger/kernel"}),),
        no="evaluate evaluate-model",
        says="attn_implementation",
    ),
    Input(
        "kernel-of-the-recipe",
        _recipe(attn_implementation="stranger/kernel"),
        no="evaluate evaluate-run",
        says="attn_implementation",
    ),
    Input(
        "kernel-of-the-manifest",
        (
            removed("run/used_recipe.yaml", "run/checkpoint-3/used_recipe.yaml"),
            manifest(
                lambda body: (
                    _set("metadata", "evaluation", "attn_implementation", value="stranger/kernel")(body),
                    body["files"].remove(next(each for each in body["files"] if each["name"] == "used_recipe.yaml")),
                )
            ),
        ),
        no="evaluate-data",
        says="attn_implementation",
    ),
    Input(
        "generate-of-the-folder",
        (text("model/custom_generate/generate.py", lambda place: place.code() + "def generate(*a, **k): pass\n"),),
        "evaluate-model",
    ),
    Input(
        "tokenizer-with-code",
        (
            text("model/evil.py", lambda place: place.code()),
            text("model/tokenizer_config.json", json.dumps({"tokenizer_class": "T", "auto_map": OWN_CODE})),
            removed("model/tokenizer.json"),
        ),
        no="evaluate-model",
    ),
    Input(
        "template-with-code",
        (
            signed_json(
                "tokenizer_config.json",
                _set("chat_template", value="{{ cycler.__init__.__globals__.os.system('touch ran') }}"),
            ),
        ),
        no="evaluate-chats",
        says="template",
    ),
    Input(
        "pickle-of-the-model",
        (removed("model/model.safetensors"), archive("model/pytorch_model.bin")),
        no="evaluate-model train-model import inspect-model verify-model",
    ),
    Input("pickle-for-load", (archive("file.pt"),), no="load import-file", says="file.pt"),
    Input(
        "pickle-of-an-old-torch",
        (lambda place: (place.root / "place" / "file.pt").write_bytes(evil_pickle(place)),),
        no="load import-file",
        says="file.pt",
    ),
    Input(
        "pickle-beside-a-checkpoint",
        (
            lambda place: (place.model / "training_args.bin").write_bytes(evil_pickle(place)),
            archive("model/optimizer.pt"),
            archive("model/scheduler.pt"),
            text("model/trainer_state.json", "{}"),
        ),
        "evaluate-model",
        "inspect-model import",
    ),
    Input(
        "pickle-of-dcp",
        (
            removed("model/model.safetensors", "model/config.json"),
            lambda place: (place.model / ".metadata").write_bytes(evil_pickle(place)),
        ),
        no="import inspect-model verify-model",
        says=".metadata",
    ),
    Input(
        "pickle-of-an-adapter",
        (removed("adapter/adapter_model.safetensors"), archive("adapter/adapter_model.bin")),
        no="evaluate-adapter",
    ),
    Input(
        "module-of-an-adapter",
        (
            text("run/evil.py", lambda place: place.code()),
            lambda place: (place.adapter / "adapter_config.json").write_text(
                json.dumps(
                    {
                        **json.loads((place.adapter / "adapter_config.json").read_text()),
                        "megatron_config": {"a": 1},
                        "megatron_core": "place.run.evil",
                    }
                )
            ),
        ),
        no="evaluate-adapter",
        says="adapter_config.json",
    ),
    Input("code-of-the-recipe-s-data", (text("data/data.py", lambda place: place.code()),), "rows"),
)

# Links, and files of the user's

_OURS = "status.json metrics.jsonl events.jsonl used_recipe.yaml config.json generation_config.json tokenizer.json"
_TO_FOLDER, _TO_FILE = "outside/folder", "outside/secret.txt"

LINKS = (
    Input("coordination-is-a-link", (link("run/.stepmark", _TO_FOLDER),), "report", "resume", ".stepmark"),
    Input("coordination-is-a-link-for-watchers", (link("run/.stepmark", _TO_FOLDER),), "", "evaluate-run", ".stepmark"),
    Input("model-staging-is-a-link", (link("run/.model", _TO_FOLDER),), "inspect-run", "resume", ".model"),
    Input("term-is-a-link", (link("run/.stepmark/.owner.0", _TO_FOLDER),), "resume"),
    Input("claim-is-a-link", (link("run/.stepmark/1a2b3c4d", _TO_FOLDER),), "resume report"),
    *(
        Input(f"a-part-of-{name}-is-a-link", (link(f"run/{name}.part", _TO_FILE),), "resume")
        for name in ("status.json", "used_recipe.yaml", "evaluations.csv", "trackers.json")
    ),
    *(Input(f"{name}-is-a-link", (link(f"run/{name}", _TO_FILE),), "", "resume", name) for name in _OURS.split()[1:3]),
    *(Input(f"{name}-is-a-link", (link(f"run/{name}", _TO_FILE),), "resume") for name in _OURS.split()[3:]),
    Input("status.json-is-a-link", (link("run/status.json", "outside/secret.json"),), "inspect-run report resume"),
    Input("a-weight-is-a-link", (link("run/model.safetensors", _TO_FILE),), "resume"),
    Input("results-are-links", (link("run/all_results.json", "outside/secret.json"),), "resume"),
    Input("trackers-are-a-link", (link("run/trackers.json", "outside/secret.json"),), "resume"),
    Input("trainer-state-is-a-link", (link("run/trainer_state.json", _TO_FILE),), "resume"),
    Input("console-is-a-link", (link("run/console", _TO_FOLDER),), "report", "resume", "console"),
    Input("console-file-is-a-link", (link("run/console/rank-0.txt", _TO_FILE),), "resume report"),
    Input("failures-are-a-link", (link("run/failures", _TO_FOLDER),), "report inspect-run", "resume", "failures"),
    Input("system-is-a-link", (link("run/system", _TO_FOLDER),), "report", "resume", "system"),
    Input("lock-is-a-link", (link("run/.stepmark/evaluations.lock", "outside/new"),), "", "evaluate-run", "lock"),
    Input("evaluations-are-a-link", (link("run/evaluations.jsonl", _TO_FILE),), "", "report evaluate-run", "jsonl"),
    Input("stop-is-a-link", (link("run/.stepmark/stop.json", "outside/secret.json"),), "resume"),
    Input(
        "metrics-named-as-paths",
        (
            appended(
                "run/metrics.jsonl",
                {"step": 4, "../../../outside/made": 1.0},
                {"step": 5, "eval_../../../outside/made": 1.0, "eval_../x_loss": 2.0},
            ),
        ),
        "report inspect-run",
    ),
    Input("tensorboard-is-a-link", (link("run/runs", _TO_FOLDER),), "report", "evaluate-run", "runs"),
    Input(
        "a-part-of-tensorboard-is-a-link", (link("run/runs/evaluation", _TO_FOLDER),), "report", "evaluate-run", "runs"
    ),
    Input("report-is-a-link", (link("run/report.html", _TO_FILE),), "report-inside"),
    Input("a-checkpoint-is-a-link", (link("run/checkpoint-9", _TO_FOLDER),), "report inspect-run resume"),
    Input("an-unfinished-save-is-a-link", (link("run/.checkpoint-9.1a2b3c4d-000009", _TO_FOLDER),), "resume report"),
    Input("a-replaced-one-is-a-link", (link("run/.replaced-checkpoint-9.1a2b3c4d-000009", _TO_FOLDER),), "resume"),
    Input("best-is-a-link-outside", (link("run/best", _TO_FOLDER),), "report resume evaluate-run"),
    Input("an-earlier-run-is-a-link", (link("run/earlier-run-1", "outside/new"), removed("{c}")), "resume"),
    Input(
        "lease-is-a-link", (link("run/.stepmark/lease.checkpoint-1.once.1a2b3c4d5e6f", _TO_FILE),), "resume verify-run"
    ),
    Input(
        "manifest-is-a-link",
        (link("{c}/manifest.json", "outside/secret.json"),),
        "resume",
        BEFORE_ANY_TENSOR,
        "manifest.json",
    ),
    Input(
        "a-tensor-file-is-a-link",
        (link("{c}/model.safetensors", "outside/secret.txt"),),
        "resume consolidate-run",
        "verify evaluate consolidate",
    ),
    Input(
        "a-folder-of-a-checkpoint-is-a-link", (link("{c}/optimizer", _TO_FOLDER),), "resume", "verify export-trainer"
    ),
    Input("config-is-a-link", (link("{c}/config.json", "outside/secret.json"),), "", "evaluate consolidate"),
    Input(
        "config-of-a-model-is-a-link",
        (link("model/config.json", "outside/secret.json"),),
        "import",
        "evaluate-model train-model",
    ),
    Input(
        "weights-of-a-model-are-a-link",
        (link("model/model.safetensors", "outside/secret.txt"),),
        "",
        "evaluate-model import inspect-model",
    ),
    Input("metrics-are-a-hard-link", (hard_link("run/metrics.jsonl", _TO_FILE),), "resume"),
    Input("config-is-a-hard-link", (hard_link("run/config.json", _TO_FILE),), "resume"),
    # The user's own
    Input(
        "own-hidden-files",
        (
            text("run/.stepmark-notes", "mine"),
            text("run/.stepmark-plans/plan.txt", "mine"),
            old("run/.stepmark-notes", "run/.stepmark-plans"),
        ),
        "resume",
        keeps=(".stepmark-notes", ".stepmark-plans/plan.txt"),
    ),
    Input(
        "own-file-named-as-a-checkpoint",
        (text("run/checkpoint-4", "mine"),),
        "",
        "resume",
        "checkpoint-4",
        ("checkpoint-4",),
    ),
    Input(
        "own-folder-named-as-a-checkpoint",
        (text("run/checkpoint-4/mine.txt", "mine"),),
        "resume",
        keeps=("damaged-checkpoint-4/mine.txt",),
    ),
    Input(
        "own-folder-named-as-the-staging", (text("run/.model/mine.txt", "mine"),), "resume", keeps=(".model/mine.txt",)
    ),
    Input(
        "own-folder-in-the-coordination",
        (text("run/.stepmark/.mine/a.txt", "mine"),),
        "resume",
        keeps=(".stepmark/.mine/a.txt",),
    ),
    Input(
        "own-folder-named-as-a-save",
        (text("run/.checkpoint-1.notes/a.txt", "mine"),),
        "resume",
        keeps=(".checkpoint-1.notes/a.txt",),
    ),
    Input(
        "own-weights",
        (text("run/model-old.safetensors", "mine"), text("run/model.safetensors.bak", "mine")),
        "resume",
        keeps=("model-old.safetensors", "model.safetensors.bak"),
    ),
    Input(
        "own-file-in-place-of-the-coordination",
        (removed("run/.stepmark"), text("run/.stepmark", "mine")),
        "",
        "resume",
        ".stepmark",
        (".stepmark",),
    ),
    Input("own-file-in-place-of-the-staging", (text("run/.model", "mine"),), "", "resume", ".model", (".model",)),
)

# What is read without a bound

_OF_MANIFEST = "inspect inspect-json verify evaluate consolidate export-dcp export-trainer dcp"

BOUNDS = (
    Input(
        "manifest-of-a-program-is-a-pipe",
        (pipe("saved/checkpoint-2/manifest.json"),),
        "restore",
        "dcp",
        "manifest.json",
    ),
    Input("manifest-is-a-pipe", (pipe("{c}/manifest.json"),), "report resume", BEFORE_ANY_TENSOR, "manifest.json"),
    Input(
        "manifest-without-end",
        (link("{c}/manifest.json", "/dev/zero"),),
        "report resume",
        BEFORE_ANY_TENSOR,
        "manifest.json",
    ),
    Input("manifest-is-a-folder", (folder("{c}/manifest.json"),), "report", BEFORE_ANY_TENSOR, "manifest.json"),
    Input(
        "manifest-is-sparse",
        (sparse("{c}/manifest.json"),),
        "report resume consolidate-run",
        BEFORE_ANY_TENSOR,
        "manifest.json",
    ),
    Input(
        "manifest-of-many-values",
        (manifest_text('"metrics": {', f'"more": [{"[]," * 9_000_000}0],\n"metrics": {{'),),
        "report",
        "inspect verify consolidate",
        "manifest.json",
    ),
    Input(
        "manifest-is-nested",
        (manifest_text('"metrics": {', f'"more": {"[" * 200_000}{"]" * 200_000},\n"metrics": {{'),),
        "report",
        BEFORE_ANY_TENSOR,
        "manifest.json",
    ),
    Input(
        "header-as-large-as-the-manifest-says",
        (
            sparse_listed(MODEL),
            manifest(lambda body: [each.update(header=TERA) for each in body["files"] if each["name"] == MODEL]),
        ),
        "report resume",
        "verify evaluate consolidate",
        "header",
    ),
    Input(
        "header-larger-than-safetensors",
        (header(MODEL, lambda body: body["__metadata__"].update(more=" " * 120_000_000)),),
        "resume",
        "verify evaluate",
        "header",
    ),
    Input(
        "shape-of-60000-dims",
        (manifest(_set("tensors", "model", "transformer.wpe.weight", value=["F32", WIDE, [[1, [0] * 60_000, WIDE]]])),),
        "report",
        "inspect verify evaluate",
        "manifest.json",
    ),
    Input(
        "shapes-of-60000-dims",
        (
            manifest(
                lambda body: body["tensors"].update(
                    more={f"t{n}": ["F32", WIDE, [[0, [0] * 60_000, WIDE]]] for n in range(60)}
                )
            ),
        ),
        "report resume",
        "inspect verify evaluate",
        "manifest.json",
    ),
    Input(
        "header-of-60000-dims",
        (header(MODEL, lambda body: body["transformer.wpe.weight"].update(shape=WIDE)),),
        "resume",
        "verify evaluate consolidate",
    ),
    Input("state-is-sparse", (sparse_listed("state.json"),), "report resume", "verify evaluate", "state.json"),
    Input(
        "state-of-a-gigabyte",
        (
            sparse_listed("state.json", 1 << 30),
            lambda place: manifest(
                lambda body: [
                    each.update(digest=_digest_of_zeros(place))
                    for each in body["files"]
                    if each["name"] == "state.json"
                ]
            )(place),
        ),
        "report resume",
        "evaluate",
        "state.json",
    ),
    Input(
        "state-of-many-values",
        (
            signed_file(
                "state.json",
                lambda _, data: data.replace(b'{"version"', b'{"more": [' + b"{}," * 9_000_000 + b'0], "version"'),
            ),
        ),
        "inspect resume",
        "evaluate",
        "state.json",
    ),
    Input(
        "state-is-nested",
        (
            signed_file(
                "state.json",
                lambda _, data: data.replace(b'"extra": {}', b'"extra": ' + b"[" * 100_000 + b"]" * 100_000),
            ),
        ),
        "inspect resume",
        "evaluate",
        "state.json",
    ),
    Input("state-is-a-pipe", (pipe("{c}/state.json"),), "resume", "verify evaluate export-trainer", "state.json"),
    Input("tensors-are-a-pipe", (pipe("{c}/model.safetensors"),), "resume", "verify evaluate consolidate", MODEL),
    Input(
        "config-is-a-pipe",
        (pipe("{c}/config.json"),),
        "resume",
        "verify evaluate consolidate export-trainer",
        "config.json",
    ),
    Input(
        "config-of-a-model-is-a-pipe",
        (pipe("model/config.json"),),
        "import",
        "evaluate-model train-model",
        "config.json",
    ),
    Input(
        "config-of-a-model-without-end",
        (link("model/config.json", "/dev/zero"),),
        "import",
        "evaluate-model",
        "config.json",
    ),
    Input(
        "config-of-a-model-is-sparse",
        (sparse("model/config.json"),),
        "",
        "evaluate-model import train-model",
        "config.json",
    ),
    Input("tokenizer-of-a-model-is-a-pipe", (pipe("model/tokenizer.json"),), "", "evaluate-model", "tokenizer"),
    Input("tokenizer-of-a-model-is-sparse", (sparse("model/tokenizer.json"),), "", "evaluate-model", "tokenizer"),
    Input(
        "weights-of-a-model-are-a-pipe", (pipe("model/model.safetensors"),), "", "evaluate-model import inspect-model"
    ),
    Input(
        "index-of-a-model-is-a-pipe",
        (removed("model/model.safetensors"), pipe("model/model.safetensors.index.json")),
        "",
        "evaluate-model import",
    ),
    Input(
        "index-of-a-model-leads-out",
        (_index_outside,),
        "",
        "evaluate-model train-model import",
        "model.safetensors.index.json",
    ),
    Input(
        "options-of-a-model-are-sparse",
        (sparse("model/stepmark_evaluation.json"),),
        "",
        "evaluate-model",
        "stepmark_evaluation.json",
    ),
    Input(
        "latest-of-deepspeed-is-sparse",
        (removed("model/model.safetensors"), sparse("model/latest")),
        "",
        "import inspect-model",
    ),
    Input("adapter-is-a-pipe", (pipe("adapter/adapter_config.json"),), "", "evaluate-adapter"),
    Input(
        "metadata-of-dcp-is-a-pipe",
        (removed("model/model.safetensors"), pipe("model/.metadata")),
        "",
        "import inspect-model",
    ),
    Input("status-is-a-pipe", (pipe("run/status.json"),), "inspect-run report resume evaluate-run"),
    Input("status-without-end", (link("run/status.json", "/dev/zero"),), "inspect-run report"),
    Input("status-is-sparse", (sparse("run/status.json"),), "inspect-run report resume"),
    Input("status-is-a-folder", (folder("run/status.json"),), "inspect-run report", "resume", "status.json"),
    Input("metrics-are-a-pipe", (pipe("run/metrics.jsonl"),), "", "report inspect-run resume", "metrics.jsonl"),
    Input(
        "metrics-without-end",
        (link("run/metrics.jsonl", "/dev/zero"),),
        "",
        "report inspect-run rows resume",
        "metrics.jsonl",
    ),
    Input("metrics-are-sparse", (sparse("run/metrics.jsonl"),), "", "report inspect-run", "metrics.jsonl"),
    Input("events-are-a-pipe", (pipe("run/events.jsonl"),), "", "report inspect-run rows resume", "events.jsonl"),
    Input("a-line-of-many-values", (appended("run/events.jsonl", f"[{'[],' * 9_000_000}0]"),), "report rows"),
    Input("evaluations-are-a-pipe", (pipe("run/evaluations.jsonl"),), "", "report evaluate-run", "evaluations.jsonl"),
    Input(
        "heartbeat-is-a-pipe",
        (_status('{"state": "running", "step": 3}'), pipe("run/.stepmark/1a2b3c4d/alive.0")),
        "report inspect-run resume verify-run",
    ),
    Input(
        "heartbeat-without-end",
        (_status('{"state": "running", "step": 3}'), link("run/.stepmark/1a2b3c4d/alive.0", "/dev/zero")),
        "report resume",
    ),
    Input("lock-is-a-pipe", (pipe("run/.stepmark/evaluations.lock"),), "", "evaluate-run", "evaluations.lock"),
    Input("stop-is-a-pipe", (pipe("run/.stepmark/stop.json"),), "resume"),
    Input("console-is-a-pipe", (pipe("run/console/rank-0.txt"),), "report resume"),
    Input("console-is-sparse", (sparse("run/console/rank-7.txt"),), "report"),
    Input("failure-is-a-pipe", (pipe("run/failures/rank-0.txt"),), "report inspect-run"),
    Input("failure-is-sparse", (sparse("run/failures/rank-0.txt"),), "report"),
    Input("system-is-a-pipe", (pipe("run/system/rank-0.jsonl"),), "inspect-run", "report", "rank-0.jsonl"),
    Input("results-are-a-pipe", (pipe("run/all_results.json"), pipe("run/train_results.json")), "resume"),
    Input(
        "recipe-is-a-pipe",
        (pipe("run/used_recipe.yaml"), pipe("{c}/used_recipe.yaml")),
        "inspect",
        "rows evaluate",
        "used_recipe.yaml",
    ),
    Input(
        "recipe-of-20-megabytes",
        (text("recipe.yaml", "output_dir: x\n" * 1_500_000), *_recipe(run_name="x" * 20_000_000)),
        "",
        "rows evaluate plan doctor",
        "recipe.yaml",
    ),
    Input(
        "data-of-the-recipe-is-a-pipe", (pipe("data.txt"), *_recipe_of_data("data.txt")), "rows", "evaluate", "data.txt"
    ),
    Input(
        "data-of-the-recipe-is-without-end",
        (link("data.txt", "/dev/zero"), *_recipe_of_data("data.txt")),
        "rows",
        "evaluate",
        "data.txt",
    ),
    Input("recipe-is-nested", (text("recipe.yaml", "a: " + "[" * 50_000),), "", "plan", "recipe.yaml"),
    Input(
        "recipe-of-aliases",
        (
            text(
                "recipe.yaml",
                "a: &a [x, x, x, x, x, x, x, x, x]\n"
                + "".join(
                    f"{b}: &{b} [{','.join(['*' + a] * 9)}]\n" for a, b in zip("abcdefgh", "bcdefghi", strict=True)
                ),
            ),
        ),
        "",
        "plan doctor",
    ),
    Input("recipe-is-a-device", (link("recipe.yaml", "/dev/zero"),), "", "plan", "recipe.yaml"),
    Input("archive-that-grows", (archive("file.pt", compressed=True, evil=False),), "", "load import-file", "file.pt"),
    Input("file-is-a-pipe", (pipe("file.pt"),), "", "load import-file", "file.pt"),
    Input("file-without-end", (link("file.pt", "/dev/zero"),), "", "load import-file"),
)

# Escapes for the terminal

SCREEN = (
    Input(
        "escape-in-a-tensor",
        (manifest(lambda body: body["tensors"]["model"].update({ESCAPE: ["F32", [0], 0]})),),
        "report",
        "inspect verify consolidate evaluate",
    ),
    Input(
        "escape-in-a-file",
        (manifest(lambda body: body["files"].append({"name": ESCAPE, "size": 1, "digest": "0" * 32})),),
        "report",
        "inspect verify evaluate",
    ),
    Input("escape-in-a-mesh", (manifest(_set("mesh", value={ESCAPE: 1})),), "report", "inspect verify"),
    Input(
        "escape-in-the-software", (manifest(_set("software", value={"stepmark": ESCAPE})),), "report", "inspect verify"
    ),
    Input(
        "escape-in-a-section", (manifest(_set("sections", value={"model": ESCAPE})),), "report", "verify inspect-json"
    ),
    Input("escape-in-the-metrics", (manifest(_set("metrics", value={"loss" + ESCAPE: 1.0})),), "inspect verify report"),
    Input("escape-in-the-save", (manifest(_set("save", value=ESCAPE)),), "report resume", "verify evaluate"),
    Input(
        "escape-in-a-header",
        (header(MODEL, lambda body: body.update({ESCAPE: {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]}})),),
        "resume",
        "verify evaluate consolidate",
    ),
    Input(
        "escape-in-the-status",
        (
            _status(
                json.dumps({"state": "failed" + ESCAPE, "step": 1, "reason": ESCAPE, "host": ESCAPE, "process": ESCAPE})
            ),
        ),
        "inspect-run report",
    ),
    Input(
        "escape-in-the-trouble",
        (_status('{"state": "failed", "step": 1}'), text("run/failures/rank-0.txt", f"== {ESCAPE}\nwords\n")),
        "inspect-run report",
    ),
    Input(
        "escape-in-the-devices",
        (_event("started", device=ESCAPE, device_model=ESCAPE, metric_for_best_model=ESCAPE),),
        "inspect-run report",
    ),
    Input(
        "escape-in-an-evaluation",
        (
            appended(
                "run/evaluations.jsonl",
                {"step": 3, "status": "failed", "reason": ESCAPE, "save": "x", "setup": "y", "checkpoint": ESCAPE},
            ),
        ),
        "report evaluate-run",
    ),
    Input(
        "escape-in-a-sample", (text("text.txt", f"words {ESCAPE} words\n" * 100), *_recipe_of_data("text.txt")), "rows"
    ),
    Input("escape-in-the-recipe", _recipe(run_name=ESCAPE, no_such_field=ESCAPE), "rows", no="evaluate"),
    Input(
        "escape-in-a-config", (config(model_type=ESCAPE, architectures=[ESCAPE]),), no="evaluate evaluate-model import"
    ),
    Input(
        "escape-in-a-tensor-of-a-model",
        (
            lambda place: __import__("safetensors.numpy").numpy.save_file(
                {ESCAPE: __import__("numpy").zeros(2, "float32")}, place.model / MODEL
            ),
        ),
        "",
        "inspect-model evaluate-model import",
    ),
    Input(
        "escape-in-a-file-name",
        (text(f"run/.checkpoint-9.{ESCAPE.replace('/', '')}/a", "x"), text(f"run/console/rank{ESCAPE}.txt", "x")),
        "report inspect-run resume",
    ),
    Input("escape-in-the-console", (text("run/console/rank-0.txt", ESCAPE * 9),), "report"),
)

# Values that no run writes

VALUES = (
    Input(
        "time-of-10-to-the-400",
        (manifest_text('"time": ', f'"time": {HUGE}'),),
        "report",
        BEFORE_ANY_TENSOR,
        "manifest.json",
    ),
    Input(
        "time-that-is-infinite",
        (manifest_text('"time": ', '"time": 1e999, "was": '),),
        "report",
        BEFORE_ANY_TENSOR,
        "manifest.json",
    ),
    Input(
        "step-that-is-infinite",
        (manifest_text('"step": ', '"step": 1e999, "was": '),),
        "report",
        "inspect verify",
        "manifest.json",
    ),
    Input(
        "world-of-nobody",
        (manifest(_set("world_size", value=0)), manifest(_set("mesh", value={"pp": 2}))),
        "report",
        "inspect verify",
        "manifest.json",
    ),
    Input(
        "metrics-that-are-a-list",
        (manifest(_set("metrics", value=[1, 2])),),
        "report resume",
        "inspect verify",
        "manifest.json",
    ),
    Input(
        "metadata-that-is-a-list",
        (manifest(_set("metadata", value=[1, 2])),),
        "report resume",
        "inspect verify evaluate consolidate",
        "manifest.json",
    ),
    Input(
        "identity-that-is-a-list",
        (manifest(_set("metadata", "identity", value=[1])),),
        "inspect verify consolidate evaluate",
        "resume-named",
        "checkpoint-3",
    ),
    Input(
        "model-identity-that-is-text",
        (manifest(_set("metadata", "identity", "model", value="x")),),
        "inspect verify evaluate",
        "resume-named",
    ),
    Input(
        "evaluation-of-wrong-types",
        (
            removed("run/used_recipe.yaml"),
            manifest(_set("metadata", "evaluation", value={"block_size": "x", "per_device_eval_batch_size": {}})),
            signed_file("used_recipe.yaml", b""),
        ),
        "inspect",
        "evaluate",
    ),
    Input(
        "sections-that-are-a-list",
        (manifest(_set("sections", value=["model"])),),
        "report",
        "inspect verify",
        "manifest.json",
    ),
    Input(
        "nothing-in-the-manifest",
        (manifest(lambda body: body.update(files=[], tensors={}, sections={}, software={}, mesh={})),),
        "inspect report",
        "evaluate consolidate",
    ),
    Input(
        "surrogate-in-a-tensor",
        (manifest_text('"transformer.wpe.weight"', f'"{SURROGATE}"'),),
        "report",
        "inspect verify evaluate",
    ),
    Input(
        "surrogate-in-the-metrics",
        (manifest_text('"metrics": {}', f'"metrics": {{"{SURROGATE}": 1.0}}'),),
        "inspect inspect-json verify report",
    ),
    Input("surrogate-in-the-save", (manifest_text('"save": "', f'"save": "{SURROGATE}'),), "report", "verify evaluate"),
    Input(
        "surrogate-in-the-status",
        (_status(f'{{"state": "failed", "step": 2, "reason": "{SURROGATE}", "host": "{SURROGATE}"}}'),),
        "inspect-run report resume",
    ),
    Input(
        "surrogate-in-the-events",
        (
            appended(
                "run/events.jsonl",
                f'{{"event": "trouble", "step": 1, "message": "{SURROGATE}", "kind": "{SURROGATE}"}}',
                f'{{"event": "started", "step": 1, "device": "{SURROGATE}"}}',
            ),
        ),
        "inspect-run report rows resume",
    ),
    Input(
        "surrogate-in-the-config",
        (
            signed_json("config.json", _set("name", value="x")),
            signed_file("config.json", lambda _, data: data.replace(b'"x"', SURROGATE.join('""').encode())),
        ),
        "evaluate consolidate",
    ),
    Input(
        "status-of-wrong-types",
        (
            _status(
                '{"state": ["failed"], "step": "x", "time": "now", "reason": {"a": 1}, "total_steps": "many",'
                ' "eta_seconds": [], "process": {}, "stuck": 7}'
            ),
        ),
        "inspect-run report resume evaluate-run",
    ),
    Input(
        "status-that-runs",
        (
            _status(
                '{"state": "running", "step": 1e999, "time": -1e300, "eta_seconds": 1e999,'
                ' "total_steps": 1e400, "stuck": {"where": 1}, "process": 99999999999999999999999, "host": 1}'
            ),
        ),
        "inspect-run report resume",
    ),
    Input(
        "status-of-10-to-the-400",
        (
            _status(
                f'{{"state": "running", "step": {HUGE}, "time": {HUGE}, "eta_seconds": {HUGE},'
                f' "total_steps": {HUGE}, "restart_delay": {HUGE}}}'
            ),
        ),
        "inspect-run report resume",
    ),
    Input("status-is-nested", (_status('{"a": ' + "[" * 100_000 + "]" * 100_000 + "}"),), "inspect-run report resume"),
    Input(
        "events-of-wrong-types",
        (
            _event(
                "started",
                device=3,
                device_model=[],
                ranks="x",
                parameters="x",
                total_steps="x",
                metric_for_best_model=["a"],
                mesh=3,
                arguments=[3],
                software="x",
                command=5,
            ),
            _event("saved", bytes="x", stall_seconds="y", durable_seconds=[]),
            _event("resumed", checkpoint={}),
            _event("done", reason=[1]),
        ),
        "inspect-run report rows resume",
    ),
    Input(
        "events-out-of-time",
        (
            appended(
                "run/events.jsonl",
                f'{{"event": "started", "step": {HUGE}, "time": {HUGE}, "ranks": {HUGE}}}',
                '{"event": "failed", "step": 1e999, "time": 1e999}',
                '{"event": "saved", "step": 5, "time": -1e18, "bytes": 1e999}',
                '{"event": "resumed", "step": 1, "time": null}',
            ),
        ),
        "inspect-run report rows resume",
    ),
    Input(
        "metrics-of-wrong-types",
        (
            appended(
                "run/metrics.jsonl",
                {
                    "step": 4,
                    "loss": "x",
                    "learning_rate": [],
                    "time": "t",
                    "tokens_per_second": {},
                    "target_tokens": "x",
                },
                {"step": 5, "loss": [1], "eval_loss": {}},
                {"resumed": "x"},
                {"resumed": [1], "mesh": 3},
                {"step": 6, "loss": None, "seconds": {"a": []}},
            ),
        ),
        "inspect-run report rows resume",
    ),
    Input(
        "metrics-out-of-range",
        (
            appended(
                "run/metrics.jsonl",
                f'{{"step": {HUGE}, "loss": 1.0}}',
                f'{{"step": 7, "loss": {HUGE}, "time": {HUGE}, "tokens_per_second": {HUGE}, "target_tokens": {HUGE}}}',
                '{"step": 8, "loss": 1e999, "eval_loss": 1e999, "time": 1e999}',
                f'{{"resumed": {HUGE}}}',
            ),
        ),
        "inspect-run report resume",
    ),
    Input(
        "evaluations-of-wrong-types",
        (
            appended(
                "run/evaluations.jsonl",
                {"step": "x", "status": 3},
                {"step": 3, "eval_loss": "x", "setup": [1], "save": []},
                {"step": 10**30, "status": "done", "eval_loss": 1.0, "save": "x", "setup": "y"},
            ),
        ),
        "report evaluate-run",
    ),
    Input("position-without-fields", (_position(loader={}),), "report", "rows", "events.jsonl"),
    Input(
        "position-of-10-to-the-12-samples",
        (_position(dataset_size=10**12, data="x"), *_recipe(train_file="/nowhere")),
        "",
        "rows",
        "events.jsonl",
    ),
    Input(
        "position-on-10-to-the-9-ranks", (_position(mesh={"dp": 10**9}, world_size=10**9),), "", "rows", "events.jsonl"
    ),
    Input("position-of-wrong-types", (_position(epoch="x", samples=[], seed={}),), "", "rows", "events.jsonl"),
    Input("position-of-negative-numbers", (_position(batch_size=-1, dataset_size=-5),), "", "rows"),
    Input("position-of-an-unknown-order", (_position(order="../../outside/secret"),), "", "rows"),
    Input("position-beyond-the-data", (_position(samples=10**18, epoch=10**18),), "", "rows"),
)

# Models that cannot be

MODELS = (
    Input("width-of-10-to-the-9", (config(n_embd=10**9),), no="evaluate evaluate-model import", says="config.json"),
    Input("depth-of-10-to-the-6", (config(n_layer=10**6),), no="evaluate evaluate-model", says="config.json"),
    Input("vocabulary-of-10-to-the-12", (config(vocab_size=10**12),), no="evaluate evaluate-model", says="config.json"),
    Input("positions-of-10-to-the-12", (config(n_positions=10**12),), no="evaluate evaluate-model", says="config.json"),
    Input("heads-of-none", (config(n_head=0),), no="evaluate evaluate-model", says="config.json"),
    Input("negative-width", (config(n_embd=-16),), no="evaluate evaluate-model", says="config.json"),
    Input(
        "width-that-is-text",
        (config(n_embd="wide", n_layer=None),),
        no="evaluate evaluate-model import",
        says="config.json",
    ),
    Input(
        "unknown-activation", (config(activation_function="no_such"),), no="evaluate evaluate-model", says="config.json"
    ),
    Input(
        "class-that-is-no-model",
        (
            config(architectures=["pipeline"]),
            manifest(_set("metadata", "identity", "model", "class", value="pipeline")),
        ),
        no="evaluate evaluate-model",
        says="pipeline",
    ),
    Input(
        "class-that-is-a-tokenizer",
        (config(architectures=["AutoTokenizer"]),),
        no="evaluate-model",
        says="AutoTokenizer",
    ),
    Input("class-that-is-a-number", (config(architectures=[7]),), no="evaluate-model import", says="config.json"),
    Input(
        "config-that-is-a-list",
        (signed_file("config.json", b"[1]"), text("model/config.json", "[1]")),
        no="evaluate evaluate-model import",
        says="config.json",
    ),
    Input(
        "config-that-is-nested",
        (
            signed_file("config.json", b'{"model_type": "gpt2", "a": ' + b"[" * 50_000 + b"]" * 50_000 + b"}"),
            text("model/config.json", '{"a": ' + "[" * 50_000 + "]" * 50_000 + "}"),
        ),
        no="evaluate evaluate-model import",
        says="config.json",
    ),
    Input(
        "unknown-type", (config(model_type="no_such_type"),), no="evaluate evaluate-model import", says="config.json"
    ),
    Input(
        "depth-of-a-model-that-is-imported",
        (
            config(
                model_type="llama",
                architectures=["LlamaForCausalLM"],
                hidden_size=16,
                num_attention_heads=2,
                num_hidden_layers=10**8,
                intermediate_size=16,
            ),
        ),
        no="import evaluate-model",
        says="config.json",
    ),
    Input(
        "tokens-that-are-none",
        (text("model/tokenizer.json", '{"version": "1.0"}'),),
        no="evaluate-model",
        says="tokenizer",
    ),
    Input("batch-of-10-to-the-9", _recipe(per_device_eval_batch_size=10**9), "evaluate"),
    Input("block-of-10-to-the-9", _recipe(block_size=10**9), "rows", no="evaluate", says="block_size"),
)

INPUTS = (*CODE, *LINKS, *BOUNDS, *SCREEN, *VALUES, *MODELS)


def _digest_of_zeros(place: Any) -> str:
    """The checksum of state.json as it is on the disk."""
    from stepmark.filesystem.files import file_checksum

    return file_checksum(place.checkpoint / "state.json")[1]
