"""A finding as a script, a pytest test, or an issue."""
