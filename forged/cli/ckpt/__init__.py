"""What `forgectl ckpt` does, a module for each verb. They need numpy and more, so they are loaded when one is used."""
