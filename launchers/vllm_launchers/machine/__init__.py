"""What this box is: installed engines, ports, processes."""
