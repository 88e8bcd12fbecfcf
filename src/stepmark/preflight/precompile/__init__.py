"""`stepmark precompile`: compiles a run's graphs ahead with stand-in data, and checks what is in them."""
