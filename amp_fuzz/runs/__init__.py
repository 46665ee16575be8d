"""A run: setup, drawing of cases, worker processes."""
