"""What a run did and what it is planned to do, as pages and on the terminal. Imports no torch."""
