"""Products of row groups with one matrix each: `grouped_matmul`, differentiable, with work proportional to the rows.

M rows, D and F inner and outer width, E groups. The rows are sorted by group: group e owns the `group_sizes[e]` rows after those
of the groups before it; rows past the sum belong to no group and give zeros.
"""

import jax
from jaxtyping import Array, Float, Int

from moe_jax.kernels import portable


@jax.custom_vjp
def grouped_matmul(
    x_MD: Float[Array, "M D"], w_EDF: Float[Array, "E D F"], group_sizes_E: Int[Array, " E"]
) -> Float[Array, "M F"]:
    """Row m of group e times w[e]: `[M, F]` in the dtype of x, accumulated in float32; zero past the last group.

    Any group sizes (0 included) whose sum is at most M; they are data, so changing them compiles nothing.
    """
    return portable.rows_times_matrix(x_MD, w_EDF, group_sizes_E, transpose=False)


def input_gradient(
    dy_MF: Float[Array, "M F"], w_EDF: Float[Array, "E D F"], group_sizes_E: Int[Array, " E"]
) -> Float[Array, "M D"]:
    """Row m of group e times the transpose of w[e], in the dtype of dy: the product's gradient with respect to x."""
    return portable.rows_times_matrix(dy_MF, w_EDF, group_sizes_E, transpose=True)


def weight_gradient(
    x_MD: Float[Array, "M D"],
    dy_MF: Float[Array, "M F"],
    group_sizes_E: Int[Array, " E"],
    total_EDF: Float[Array, "E D F"] | None = None,
) -> Float[Array, "E D F"]:
    """x[rows of e]^T dy[rows of e], float32: the product's gradient with respect to w. Rows of no group take no part.

    total_EDF: float32, what to add it to, in place.
    """
    return portable.weight_gradient(x_MD, dy_MF, group_sizes_E, total_EDF)


def _forward(x_MD, w_EDF, group_sizes_E):
    return grouped_matmul(x_MD, w_EDF, group_sizes_E), (x_MD, w_EDF, group_sizes_E)


def _backward(residuals, dy_MF):
    x_MD, w_EDF, group_sizes_E = residuals
    dx_MD = input_gradient(dy_MF, w_EDF, group_sizes_E)
    dw_EDF = weight_gradient(x_MD, dy_MF, group_sizes_E)
    return dx_MD.astype(x_MD.dtype), dw_EDF.astype(w_EDF.dtype), None


grouped_matmul.defvjp(_forward, _backward)
