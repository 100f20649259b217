"""The pipeline: schedules as data, what they cost, what they look like, and the loop that runs them."""
