"""What `python -m app analyze` is made of: `sample.py` draws validation samples, `measures.py`
measures routing on them, `tables.py` and `pictures.py` show it.
"""
