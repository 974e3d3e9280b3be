"""From prompts to a feature store: read prompts, filter them, let the target answer, store its hidden states.

This folder has one module per sub-command of `eagle-plugin data`; the sub-folders have the parts that these use.
Imports go down only, in this order (`tests/data/test_import_order.py`):

    builtin, named_set, prepare, generate, collect, render, vocabulary, extract, verify     the sub-commands
    collecting
    traffic, generation, preparation_stats, prepare_options, store                 do not import each other
    privacy
    sources
    masks, dialogues, target_identity, answer_faults, provenance
    target_files
    rows
"""
