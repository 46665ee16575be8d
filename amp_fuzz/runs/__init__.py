"""A run: what is drawn, in which processes, and what it sets up first."""
