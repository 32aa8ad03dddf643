"""What a plan is, what makes one legal, and its forms as text and as protobuf."""
