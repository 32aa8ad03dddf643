"""The plan: its data types, the check that it is legal, and its forms as text and as protobuf."""
