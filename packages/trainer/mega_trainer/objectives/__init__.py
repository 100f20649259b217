"""What a run makes small, where that is not the mean cross entropy of next tokens."""
