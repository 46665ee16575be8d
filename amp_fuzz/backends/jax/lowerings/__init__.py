"""ATen ops in JAX, one function each."""
