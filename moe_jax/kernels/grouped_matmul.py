"""Products of row groups with one matrix each: `grouped_matmul`, differentiable, with work proportional to the rows.

M rows, D and F inner and outer width, E groups. The rows are sorted by group: group e owns the `group_sizes[e]` rows after those
of the groups before it; rows past the sum belong to no group and give zeros. Group sizes are data: any (0 included) whose sum is
at most M, never read by the host, and others compile nothing anew.

Both factors have one dtype (ValueError otherwise). Each leg (the product and its two gradients) has its own implementation, which
`choice` takes by device, dtype and shape.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from moe_jax.collectives import vary_like
from moe_jax.kernels import portable
from moe_jax.kernels.choice import Shape, choose
from moe_jax.kernels.tiles import ROW_ALIGNMENT


@jax.custom_vjp
def grouped_matmul(
    x_MD: Float[Array, "M D"], w_EDF: Float[Array, "E D F"], group_sizes_E: Int[Array, " E"]
) -> Float[Array, "M F"]:
    """Row m of group e times w[e]: `[M, F]` in the dtype of x, accumulated in float32; zero past the last group."""
    return _rows_times_matrix("forward", x_MD, w_EDF, group_sizes_E)


def input_gradient(
    dy_MF: Float[Array, "M F"], w_EDF: Float[Array, "E D F"], group_sizes_E: Int[Array, " E"]
) -> Float[Array, "M D"]:
    """Row m of group e times the transpose of w[e], in the dtype of dy: the product's gradient with respect to x."""
    return _rows_times_matrix("input_gradient", dy_MF, w_EDF, group_sizes_E)


def weight_gradient(
    x_MD: Float[Array, "M D"],
    dy_MF: Float[Array, "M F"],
    group_sizes_E: Int[Array, " E"],
    total_EDF: Float[Array, "E D F"] | None = None,
    out_dtype: Any = None,
) -> Float[Array, "E D F"]:
    """x[rows of e]^T dy[rows of e]: the product's gradient with respect to w, summed in float32. Rows of no group take no part.

    total_EDF: float32, what to add it to. out_dtype: what the result is rounded to; None is float32. ValueError for both.
    """
    if total_EDF is not None and out_dtype is not None:
        raise ValueError(f"out_dtype is {out_dtype} beside a total, which is float32: leave one of them out")
    out_dtype = jnp.float32 if out_dtype is None else out_dtype
    _check_dtypes(x_MD, dy_MF)
    (num_rows, inner), out = x_MD.shape, dy_MF.shape[1]
    choice = choose(Shape("weight_gradient", x_MD.dtype, num_rows, group_sizes_E.shape[0], inner, out))
    if choice.tiles is None:
        dw_EDF = portable.weight_gradient(x_MD, dy_MF, group_sizes_E, total_EDF)
        return dw_EDF if total_EDF is not None else dw_EDF.astype(out_dtype)
    from moe_jax.kernels import hopper  # here: a jaxlib without CUDA need not have what it imports

    dw_EDF = hopper.weight_gradient(
        _pad_rows(x_MD), _pad_rows(dy_MF), group_sizes_E, out_dtype=out_dtype, tiles=choice.tiles
    )
    dw_EDF = vary_like(dw_EDF, x_MD, dy_MF, group_sizes_E)
    return dw_EDF if total_EDF is None else total_EDF + dw_EDF


def _forward(x_MD, w_EDF, group_sizes_E):
    return grouped_matmul(x_MD, w_EDF, group_sizes_E), (x_MD, w_EDF, group_sizes_E)


def _backward(residuals, dy_MF):
    x_MD, w_EDF, group_sizes_E = residuals
    dx_MD = input_gradient(dy_MF, w_EDF, group_sizes_E)
    dw_EDF = weight_gradient(x_MD, dy_MF, group_sizes_E, out_dtype=w_EDF.dtype)
    return dx_MD.astype(x_MD.dtype), dw_EDF, None


grouped_matmul.defvjp(_forward, _backward)


def _rows_times_matrix(leg: str, x: jax.Array, w_EDF: jax.Array, group_sizes_E: jax.Array) -> jax.Array:
    """x is [M, D], or [M, F] for the input's gradient."""
    _check_dtypes(x, w_EDF)
    num_rows, transpose = x.shape[0], leg == "input_gradient"
    choice = choose(Shape(leg, x.dtype, num_rows, *w_EDF.shape))
    if choice.tiles is None:
        return portable.rows_times_matrix(x, w_EDF, group_sizes_E, transpose=transpose)
    from moe_jax.kernels import hopper

    y = hopper.rows_times_matrix(_pad_rows(x), w_EDF, group_sizes_E, transpose=transpose, tiles=choice.tiles)
    return vary_like(y[:num_rows], x, w_EDF, group_sizes_E)


def _check_dtypes(a: jax.Array, b: jax.Array) -> None:
    if a.dtype != b.dtype:
        raise ValueError(f"both factors of a grouped product must have one dtype, not {a.dtype} and {b.dtype}")


def _pad_rows(x: jax.Array) -> jax.Array:
    """x with as many rows more as the Hopper kernels' addressing needs."""
    missing = -x.shape[0] % ROW_ALIGNMENT
    return jnp.pad(x, ((0, missing), (0, 0))) if missing else x
