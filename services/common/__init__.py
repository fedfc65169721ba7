"""What any process needs: settings, server life, calls, telemetry, logs. Knows no service."""
