"""`stepmark plan`: a recipe's memory, steps and checkpoint sizes, without its device and its weights."""
