// An episode by its id: looks for its row and goes there, so that a log line's id can be linked to.
import { useEffect, useState } from "preact/hooks";
import { link } from "../route";
import { useRun, useTitle } from "../ui/hooks";
import { Failure, Loading, Notice } from "../ui/parts";

export function EpisodePage({ run, id }: { run: string; id: string }) {
  useTitle(`Episode ${id}`, run);
  const store = useRun(run);
  const [error, setError] = useState<Error | null>(null);
  useEffect(() => {
    store.loadTrajectories().catch(setError);
  }, [store]);
  const row = store.trajectories.column("id").indexOf(id);
  useEffect(() => {
    if (row >= 0) location.replace(link(["runs", run, "trajectories", store.trajectories.text("seq", row)]));
  }, [row]);
  if (error) return <Failure error={error} what={`Episode ${id}`} />;
  if (row < 0 && store.trajectoriesLoaded) {
    return (
      <Notice kind="problem">
        <strong>This run has no episode {id}.</strong> It may still be played, or belong to another run. <a href={link(["runs", run, "trajectories"])}>See the run's trajectories</a>
      </Notice>
    );
  }
  return <Loading what={`episode ${id}`} />;
}
