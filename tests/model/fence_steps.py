"""How a daemon of the fence model prunes a step folder, while a trainer may write that step again.

The folder is set aside by a rename into the own trash, looked at once more, and only then
condemned; what one does not recognise is put back. A take-over moves what it finds set aside into
its own trash, and puts it back. What is never to happen is that a step which was written again is
deleted: nobody had decided that.

Only the rename that sets aside is two steps. Those that follow are out of the own trash/, where the
folder has a name of its own: once a take-over has moved it, no handle of that trash/ finds it.
"""

from collections.abc import Iterator

from .fence_state import AT_ITS_NAME, LOST, NO_HANDLE, NOT_THERE, STANDING_BY, Daemon, Disk
from .fence_take_over import Steps


def write_again(disk: Disk) -> Iterator[tuple[str, Disk]]:
    """The trainer writes the step again: into the folder of that name, or into a new one."""
    if disk.new == NOT_THERE:
        old = NOT_THERE if disk.old == AT_ITS_NAME else disk.old
        yield "trainer: write the step again", disk._replace(old=old, new=AT_ITS_NAME)


def choose_to_prune(disk: Disk, me: Daemon) -> Steps:
    """Decide on the step folder, or put back what is still set aside from before."""
    if disk.has_set_aside(me.room) and disk.finds((me.room, "trash")):
        yield "find a step folder set aside", disk, me._replace(place="put back")
    elif disk.old == AT_ITS_NAME:
        yield "decide that the step folder may go", disk, me._replace(place="set aside")


def prune(disk: Disk, me: Daemon) -> Steps:
    """One step of a prune; for "set aside" the own trash is open."""
    done = me._replace(place="ready", held=NO_HANDLE)
    trash = (me.room, "trash")
    if me.place == "set aside":
        if AT_ITS_NAME not in (disk.old, disk.new):
            yield "rename the step folder into the own trash: ENOENT", disk, done
        elif not disk.reaches(trash):
            yield "rename the step folder into the own trash: ENOENT", disk, STANDING_BY
        else:
            old, new = (me.room if at == AT_ITS_NAME else at for at in (disk.old, disk.new))
            moved = disk._replace(old=old, new=new)
            following = me._replace(place="look again", held=NO_HANDLE)
            yield "rename the step folder into the own trash", moved, following
    elif not (disk.has_set_aside(me.room) and disk.finds(trash)):
        yield f"{me.place}: ENOENT", disk, STANDING_BY
    elif me.place == "look again":
        expected = disk.old == me.room
        following = me._replace(place="condemn" if expected else "put back")
        yield f"look again: {'as expected' if expected else 'it changed'}", disk, following
    elif me.place == "condemn":
        # Under its own unique name: it is the folder that was looked at.
        yield "rename it into the own doomed/", disk._replace(old=NOT_THERE), done
    else:
        yield from ((what, after, done) for what, after in _put_back(disk, me.room))


def _put_back(disk: Disk, room: int) -> Iterator[tuple[str, Disk]]:
    """Rename back; where the name is in use, link what it lacks, and delete the rest."""
    if disk.old == room:
        back = NOT_THERE if disk.new == AT_ITS_NAME else AT_ITS_NAME
        yield "put the step folder back", disk._replace(old=back)
    if disk.new == room:
        back = LOST if disk.old == AT_ITS_NAME else AT_ITS_NAME
        yield "put the step folder back", disk._replace(new=back)
