"""The streaming engine: one component on the meta device → a plan to the byte → the checkpoint. torch begins here."""
