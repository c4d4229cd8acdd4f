"""What one cell's figures say: findings with their evidence, a bottleneck, and ranked remedies."""
