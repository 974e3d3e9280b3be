"""The benchmark of P-EAGLE: drafts of 3, 7 and 11 levels of an EAGLE-3 and a P-EAGLE head, beside plain decoding."""
