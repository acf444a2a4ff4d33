"""Files that are whole or not there: writing, locking, sealing and cleaning up."""
