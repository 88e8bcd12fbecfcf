"""What is read from a graph's text: its size, and what does not suit a compiler for accelerators."""

from __future__ import annotations

import pytest

from stepmark.preflight.precompile.graph_text import GraphText

MAIN = """module @m {{
  func.func @main(%arg0: tensor<4x4xf32>, %arg1: tensor<4xi64>) -> tensor<4x4xf32> {{
    %cst = stablehlo.constant dense<0.000000e+00> : tensor<f32>
    %0 = stablehlo.add %arg0, %arg0 : tensor<4x4xf32>
    {line}
    return %0 : tensor<4x4xf32>
  }}
}}"""


@pytest.mark.parametrize(
    ("line", "operations", "problems"),
    [
        ("%1 = stablehlo.multiply %0, %0 : tensor<4x4xf32>", 2, []),
        ('%1:2 = "stablehlo.sort"(%0, %0) <{dimension = 0 : i64}> ({', 2, []),
        ("%1 = stablehlo.convert %0 : (tensor<4x4xf32>) -> tensor<4x4xf64>", 2, ["64-bit floats (tensor<4x4xf64>)"]),
        ("%1 = stablehlo.convert %0 : (tensor<f64>) -> tensor<f32>", 2, []),  # a number, which a compiler folds
        (
            "%1 = stablehlo.dynamic_reshape %0, %arg1 : (tensor<4x4xf32>) -> tensor<?x4xf32>",
            2,
            ["a shape that depends on values (dynamic_reshape)"],
        ),
        (
            "%1 = stablehlo.set_dimension_size %0 : tensor<?xf32>",
            2,
            ["a shape that depends on values (set_dimension_size)"],
        ),
        (
            "%1 = stablehlo.custom_call @xla_python_cpu_callback(%0) : (tensor<4x4xf32>) -> tensor<f32>",
            2,
            ["a call to the host (xla_python_cpu_callback)"],
        ),
        ("%1 = stablehlo.custom_call @AllReduce(%0) : (tensor<4x4xf32>) -> tensor<4x4xf32>", 2, []),
        (
            '%c = stablehlo.constant dense<"0x00"> : tensor<512x1024xf32>',
            1,
            ["a constant of 2.0 MB (tensor<512x1024xf32>)"],
        ),
        ('%c = stablehlo.constant dense<"0x00"> : tensor<512x1024xi8>', 1, []),
        ("%c = stablehlo.constant dense<1.0> : tensor<4096x4096xf32>", 1, []),  # one value
        (
            '%1 = "stablehlo.triangular_solve"(%0, %0) <{left_side = true}> : (tensor<4x4xf32>) -> tensor<4x4xf32>',
            2,
            ["an operation that Neuron's compiler rejects (triangular_solve)"],
        ),
        (
            "%1 = stablehlo.complex %0, %0 : tensor<4x4xcomplex<f32>>",
            2,
            ["a type that Neuron's compiler rejects (complex)"],
        ),
        (
            "%1 = stablehlo.convert %0 : (tensor<4x4xf32>) -> tensor<4x4xf8E5M2FNUZ>",
            2,
            ["a type that Neuron's compiler rejects (f8E5M2FNUZ)"],
        ),
    ],
)
def test_problems_are_named(line: str, operations: int, problems: list[str]) -> None:
    read = GraphText.read(MAIN.format(line=line))
    assert (read.operations, read.parameters, list(read.problems)) == (operations, 2, problems)


def test_operations_that_neurons_list_lacks() -> None:
    lines = ["%1 = stablehlo.logistic %0 : tensor<4x4xf32>", "%2 = stablehlo.tanh %1 : tensor<4x4xf32>"]
    assert GraphText.read(MAIN.format(line="\n".join(lines))).unlisted == ("logistic",)
