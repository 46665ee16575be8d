"""Processes that may die: forks, a supervised minimiser, its worker."""
