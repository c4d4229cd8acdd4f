"""Analyze one cell: findings with evidence, a bottleneck, and ranked remedies."""
