"""GPU closed forms; pure arithmetic on a fingerprint, so that they answer for devices that are not there."""
