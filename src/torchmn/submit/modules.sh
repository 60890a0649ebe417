type module >/dev/null 2>&1 || {
  for file in "$MODULESHOME/init/bash" /etc/profile.d/{modules,lmod}.sh; do
    if [ -r "$file" ]; then . "$file"; break; fi
  done
}
