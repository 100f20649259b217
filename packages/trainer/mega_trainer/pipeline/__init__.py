"""Pipeline parallelism: schedules as data, their timing and drawing, and the executor that runs them."""
