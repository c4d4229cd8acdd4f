"""Jobs that record runs with worker processes and ingest the runs into the store."""
