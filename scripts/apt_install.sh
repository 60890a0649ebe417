# Sourced by the scripts that set up launchers and schedulers: apt_install PACKAGE...

# Install Debian packages without starting their services. Fails, with a message, where it cannot.
apt_install() {
  if [ "$(id -u)" -ne 0 ] || ! command -v apt-get >/dev/null; then
    echo "$(basename "$0" .sh): missing, and only root can install them: apt-get install $*" >&2
    return 1
  fi
  (
    # a policy for this one installation: no service is started
    policy=/usr/sbin/policy-rc.d
    if [ ! -e "$policy" ]; then
      printf '#!/bin/sh\nexit 101\n' >"$policy"
      chmod +x "$policy"
      trap 'rm -f "$policy"' EXIT
    fi
    export DEBIAN_FRONTEND=noninteractive
    apt-get update -qq && apt-get install -y -qq --no-install-recommends "$@"
  ) || {
    echo "$(basename "$0" .sh): apt-get cannot install $*" >&2
    return 1
  }
}
