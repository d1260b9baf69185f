"""What one layer costs on one device: its slice is priced and scheduled, giving a LayerProfile per parallelism."""
