"""A run's history as one HTML page."""
