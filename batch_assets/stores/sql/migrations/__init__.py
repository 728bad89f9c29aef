"""How a database comes to the present schema, one step per file; alembic runs them (`stores/sql/schema.py`), on SQLite and PostgreSQL.

To change a table: edit `tables.py`, then add `rNNNN_what.py` with the next `revision` and the last one as `down_revision`. A step names
its columns itself and never imports `tables.py`, which moves on. It is never edited once it has been released. There is no way down: an
older gristmill refuses a newer schema. `tests/register/test_schema.py` compares what the steps make with `tables.py` on both databases.
"""
