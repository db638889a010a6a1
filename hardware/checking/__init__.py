"""What the checks of prepared machines share: running parts within a time, the report, and parts that ask every device the same."""
