"""Which sample is read when: pure functions of a seed and a number."""
