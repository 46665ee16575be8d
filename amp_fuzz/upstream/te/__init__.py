"""Where Transformer Engine differs from its documentation."""
