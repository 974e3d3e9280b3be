"""Training draft heads: the objectives of EAGLE-2, EAGLE-3 and P-EAGLE, and one loop for all of them."""
