"""Generator of the tables in docs/reference: settings, HTTP API, errors, metrics, commands.

`python -m scripts.reference` replaces the text between two comments of a page,
`<!-- generated: NAME -->` and `<!-- end of generated text -->`. The rest of a page is written by
hand.
"""
