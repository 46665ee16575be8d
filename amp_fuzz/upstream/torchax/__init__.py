"""Where torchax differs from its documentation."""
