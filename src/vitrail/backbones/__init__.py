"""What reads and continues a stream."""
