"""Which slice of which tensor a rank holds: data and arithmetic, no devices."""
