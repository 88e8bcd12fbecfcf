"""`stepmark cache`: lists and trims the caches of compiled graphs."""
