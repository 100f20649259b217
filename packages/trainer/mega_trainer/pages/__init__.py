"""Reports of runs and plans, as HTML pages and on the terminal. Imports no torch."""
