"""What backends over torch have in common; no backend itself."""
