"""A finding as text for others: script, pytest test, issue."""
