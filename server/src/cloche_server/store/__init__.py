"""The database: records to rows and back. SQL lives in `.sql` files beside this package."""
