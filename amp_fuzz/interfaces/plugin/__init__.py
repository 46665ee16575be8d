"""``pytest --amp-fuzz``: options, items, the session."""
