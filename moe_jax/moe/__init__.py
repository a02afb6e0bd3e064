"""The MoE block in four parts that know nothing of each other: router, dispatch, experts, and the layer that composes them."""
