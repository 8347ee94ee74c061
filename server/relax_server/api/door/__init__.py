"""What a request passes before the application sees it: connections, time-outs, sizes, browsers, and whether it shows a key."""
