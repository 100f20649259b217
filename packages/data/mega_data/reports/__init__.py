"""Reports on token data sets: inspection, statistics and HTML pages."""
