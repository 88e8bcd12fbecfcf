"""What `stepmark precompile` prints."""

from __future__ import annotations

from stepmark.preflight.precompile.graph_text import NEW, Graph, GraphText, describe

STEP = Graph("step", GraphText(1200, 79), "a", 1.25, NEW)
ODD = Graph("evaluation", GraphText(90, 25, ("a call to the host (f)",)), "b", 0.5, NEW)


def test_the_graphs_of_one_rank() -> None:
    assert describe([[STEP, ODD]], "/cache", reads_back=True).splitlines() == [
        "graph       operations  parameters  seconds  state",
        "step              1200          79      1.2  new",
        "evaluation          90          25      0.5  new",
        "2 graphs in 1.8 seconds, in /cache",
        "warning: evaluation: has a call to the host (f)",
    ]


def test_ranks_with_different_graphs_are_named() -> None:
    lines = describe([[STEP], [STEP], [ODD]], "/cache", reads_back=True).splitlines()
    assert "1 graphs on each of 3 ranks in 1.2 seconds, in /cache" in lines
    assert "warning: rank 2 has other graphs than rank 0; with collectives in the graph the run would hang" in lines


def test_stages_of_a_pipeline_have_graphs_of_their_own() -> None:
    lines = describe([[STEP], [STEP], [ODD], [STEP]], "/cache", reads_back=True, stages=2).splitlines()
    assert "1 graphs of pipeline stage 1 on each of 2 ranks in 1.2 seconds, in /cache" in lines
    assert "1 graphs of pipeline stage 2 on each of 2 ranks in 0.5 seconds, in /cache" in lines
    assert [line for line in lines if "other graphs" in line] == [
        "warning: rank 3 has other graphs than rank 2; with collectives in the graph the run would hang"
    ]


def test_a_client_that_cannot_read_back_is_said() -> None:
    assert "note: XLA's CPU client cannot read" in describe([[STEP]], "/cache", reads_back=False)


def test_operations_that_neurons_list_lacks_are_noted_once() -> None:
    gate = Graph("step", GraphText(3, 2, unlisted=("logistic", "while")), "c", 0.5, NEW)
    by_rank = [[gate, gate], [gate, gate]]
    notes = [line for line in describe(by_rank, None, reads_back=True, for_neuron=True).splitlines() if "note:" in line]
    assert notes == [
        "note: Neuron's published list of operators lacks logistic, while; "
        "`neuronx-cc list-operators --framework XLA` shows the compiler's own"
    ]
    assert "note:" not in describe(by_rank, None, reads_back=True)
    assert "note:" not in describe([[STEP]], None, reads_back=True, for_neuron=True)
