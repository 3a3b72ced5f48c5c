"""What a run shows of itself: budgets, samples, synthetic data sets with their card."""
