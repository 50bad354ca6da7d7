# What a guest of the rack runs once its root is there: reads orders from the host, one a line, and tells how each ended.
#   NUMBER run            run /run/rack/NUMBER.sh in a session of its own, its output to /run/rack/NUMBER.out
#   0 nursery             run /run/rack/nursery.sh, which answers `nursery` when it can fork
#   NUMBER fork           have it run /run/rack/NUMBER.json (nursery.py)
#   NUMBER in TEXT        a line for its standard input
#   NUMBER kill SIGNAL    to its whole session
# Answers: `ready` once; `NUMBER pid PID` and `NUMBER end STATUS` for each run.
B=/run/busybox
export PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin HOME=/root LANG=C.UTF-8
ulimit -l unlimited
ulimit -c 0
ulimit -n 65536
$B ip link set lo up
$B hostname "$($B sed -n 's/.*\brack_name=\([^ ]*\).*/\1/p' /proc/cmdline)"
for device in /sys/class/virtio-ports/*; do
  [ "$($B cat "$device/name")" = rack ] && port=/dev/${device##*/}
done
exec 3<>"$port"
echo ready >&3
while IFS=' ' read -r number verb rest <&3; do
  case $verb in
    run)
      $B mkfifo "/tmp/.in.$number" "/tmp/.up.$number"
      (
        exec 4<>"/tmp/.in.$number"
        echo up >"/tmp/.up.$number"
        $B setsid $B sh "/run/rack/$number.sh" <&4 >"/run/rack/$number.out" 2>&1 3>&- 4>&- &
        pid=$!
        echo "$pid" >"/tmp/.pid.$number"
        echo "$number pid $pid" >&3
        wait "$pid"
        echo "$number end $?" >&3
      ) &
      read -r up <"/tmp/.up.$number" # what is said before somebody has the pipe open would be lost
      ;;
    nursery)
      $B mkfifo /tmp/.nursery
      $B setsid $B sh /run/rack/nursery.sh <>/tmp/.nursery >/run/rack/nursery.out 2>&1 &
      ;;
    fork) printf '%s\n' "$number" 1<>/tmp/.nursery ;;
    in) printf '%s\n' "$rest" 1<>"/tmp/.in.$number" ;;
    kill) kill -s "$rest" -- "-$($B cat "/tmp/.pid.$number")" 2>/dev/null ;;
  esac
done
